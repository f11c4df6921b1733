"""What every lowering uses: the table of lowerings, schemas, forms that follow from others, promotion, random bits."""
